"""The module that runs a pipeline rank's stages."""
