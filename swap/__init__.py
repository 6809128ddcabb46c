"""Moves what autograd saved, storage by storage, between device, host arena and NVMe."""
