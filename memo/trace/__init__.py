"""Trace events, their files, statistics and pictures. Imports no torch."""
