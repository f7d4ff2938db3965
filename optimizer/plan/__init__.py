"""`optimize plan`: what a model will take and how fast it will be on a device, before it is run there."""
