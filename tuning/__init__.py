"""Tuners. kvprobe loads them by path; this file lets the import contracts see the folder."""
