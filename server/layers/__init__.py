"""The building blocks of the decoder, each split over the ranks and each pulling its own slice of the checkpoint.

How a layer is split and how its weights are stored are two interfaces that are never multiplied: layers hand the
plain form of a weight to the backend's format. In a mixture of experts tokens are sorted by expert once per layer,
and the products of all experts are one operator that reads on the device where each expert's tokens end, so that
decode steps are captured like any others.
"""
