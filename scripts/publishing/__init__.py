"""Publishing a head on the Hugging Face hub: what is uploaded, its card, and the upload
itself."""
