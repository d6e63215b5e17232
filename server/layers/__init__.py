"""The building blocks of the decoder, each split over the ranks and each pulling its own slice of the checkpoint."""
