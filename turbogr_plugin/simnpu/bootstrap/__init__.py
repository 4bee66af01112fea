"""The folder that `turbogr dryrun` puts on PYTHONPATH; nothing imports it as a package."""
