"""What `prove` runs beside a certificate."""
