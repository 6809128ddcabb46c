"""Requests of `memo plan`, searches for a length and for GPUs, and changes that make a plan fit."""
