"""What every benchmark needs: a quiet moment, a load, pairs of runs, a document of the outcome."""
