"""`optimize plan`: predicts a model's memory and speed on a device."""
