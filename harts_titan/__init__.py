"""The torchtitan model and trainer of HARTS."""
