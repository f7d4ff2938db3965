"""The ops: what each means (``ops``), what everyone shares about them (``contracts``), and kernels for each target."""
