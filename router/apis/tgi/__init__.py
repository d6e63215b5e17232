"""TGI's own routes."""
