"""A step: whose tokens it computes, how they are laid out, and which tokens come of it.

The router decides what a step computes; `sequences.py` checks it before anything changes, `batch.py` lays it out as
one flat row of tokens, `engine.py` launches it, and `next_tokens.py` chooses from the logits. Sampled ids stay on the
device, where the next step reads them: a step can be launched before the one before has been read.

**Drafts.** A sequence may bring guesses of its next tokens. They are computed in one run, as a prompt's chunk is, and a
token is chosen behind each as plain decoding would have chosen it: by a fork of the history that counts the guesses
before it. When the step is read, the host keeps the tokens up to the first that differs from its guess. The sequence
then waits for the router, whose next draft says where it goes on; a draft without guesses leads back to plain decoding.
What stands behind the accepted token, in blocks and rings, is never seen and written over. A recurrent layer has one
state alone, so the one before the guesses is kept in a spare row. After a wrong guess the next run begins there and
computes what came once more beside its own tokens, in two calls of the recurrence and one of everything else.

**Graphs.** A step in which all sequences decode is captured once per batch size and replayed without Python: as a
CUDA graph, or on a CPU as a recording of the kernels' calls. Its inputs are rows of the device's tables and
positions. It lays itself out, chooses plain tokens, writes them where the next step reads them, and advances, so that
the host uploads something only when the set of sequences changes. On GPUs steps with up to 512 prompt tokens beside
decodes are captured too, at padded sizes. All graphs are captured before the first request; tables have room for
every sequence that the limits allow and never grow. What cannot be captured is known from the spec
(`Backend.why_not_captured`): attention in stock operators, which needs lengths on the host; on CPUs, experts in a
format that asks for the number of tokens of each, and ranks, which speak to each other within a step.

**Memory.** The profile run computes the largest step that can come: prompts of the greatest length, as many sampled
rows as are looked at together, with everything that a client may ask for. What it takes on a GPU, what graphs take,
and 1 GiB for what torch's allocator cannot make room for, is kept back; the start-up table shows it. Logits are
looked at 128 rows at a time, so that no batch takes more.

**Stages.** A pipeline stage computes the same step on its own layers: `pipeline.py` takes activations from the stage
before and hands them on. The router divides the batch into lanes (`router/scheduling/plan.py`); each lane has up to
two steps under way, and they take turns. The replies are those of the last stage's first rank, which rank 0 passes
on.
"""
