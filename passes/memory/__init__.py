"""Where buffers lie."""
