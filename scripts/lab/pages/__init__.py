"""The pages and tables of docs/, rendered from JSON."""
