"""llama.cpp's server, started on loopback."""
