"""The sections of the text report, in reading order."""
