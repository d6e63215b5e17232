"""From a model's name to a rank's slices of its tensors: download, conversion, reading, formats of quantised weights.

Loading pulls: a layer asks for the part that its rank holds, so that a rank reads only its share, and a tensor that
nobody asked for is an error. Layouts that differ from ours are undone here. Nothing is unpickled but in a child
process that computes nothing (`convert.py`). Of the formats, `formats/` has one module each; what codes mean is in
`server/quantisation/`.
"""
