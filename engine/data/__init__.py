"""From a dataset to batches on the device: order, shares, per-sample randomness, workers."""
