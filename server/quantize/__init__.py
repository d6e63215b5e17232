"""Makes quantised checkpoints: `lockstep quantize`, layer by layer in bounded memory."""
