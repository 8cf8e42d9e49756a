"""Strop for web UIs: compile the UNet of A1111's and Forge's models while a picture is made."""
