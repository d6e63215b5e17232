"""Stubs that `make proto` generates from `proto/generate.proto`, which nobody changes by hand, and what both ends allow."""

# The largest message is a step that adds many long prompts: 1 M token ids are about 4 MB. gRPC's own bound is 4 MiB.
MAX_MESSAGE_BYTES = 64 * 2**20
MESSAGE_SIZES = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
