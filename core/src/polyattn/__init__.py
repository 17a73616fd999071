"""One attention call for diffusion and video transformers."""
