"""The tensorrt target: a description of the network, what its plugins launch, and the engines built of both."""
