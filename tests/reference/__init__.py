"""Plain-Python models that the native arena and the policies are compared with."""
