"""The GPUs of a window: what each did, what bound the prefills, what restores cost it."""
