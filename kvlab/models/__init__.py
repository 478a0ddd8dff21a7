"""What kvlab knows of the models it attaches to."""
