"""Sequences and steps in the form of `proto/generate.proto`, and what is wrong with a reply."""

from __future__ import annotations

from collections.abc import Sequence

from router.entry import ValidRequest
from router.queue import blocks_for
from server.pb.generate_pb2 import NewSequence, SamplingParameters, StepReply, StepRequest


def new_sequence(
    id: int,
    request: ValidRequest,
    blocks: Sequence[int],
    block_size: int,
    *,
    computed: int = 0,
    generated: Sequence[int] = (),
) -> NewSequence:
    """A sequence in wire form, whose blocks hold the first `computed` of its tokens already.

    blocks: where an encoder reads the prompt, first the encoder's blocks and then the decoder's.
    generated: the tokens that it has got, where it is rebuilt.
    """
    sampling = request.sampling
    first = blocks_for(len(request.encoder_ids), block_size)
    return NewSequence(
        id=id,
        token_ids=[*request.token_ids, *generated],
        generated=len(generated),
        computed=computed,
        blocks=blocks[first:],
        sampling=SamplingParameters(
            do_sample=sampling.do_sample,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            typical_p=sampling.typical_p,
            repetition_penalty=sampling.repetition_penalty,
            frequency_penalty=sampling.frequency_penalty,
            presence_penalty=sampling.presence_penalty,
            min_p=sampling.min_p,
            watermark=sampling.watermark,
            seed=sampling.seed,
            bias_ids=list(sampling.biases),
            biases=list(sampling.biases.values()),
            banned_word_ids=[id for word in sampling.banned_words for id in word],
            banned_word_lengths=[len(word) for word in sampling.banned_words],
            min_tokens=sampling.min_tokens,
            end_ids=sampling.end_ids,
            raw_logprobs=sampling.raw_logprobs,
        ),
        top_n_tokens=request.top_n_tokens,
        prompt_logprobs=request.prompt_logprobs and not generated,  # else the client has them
        encoder_token_ids=request.encoder_ids,
        encoder_blocks=blocks[:first],
    )


def step_request(
    step: int,
    *,
    retire: Sequence[int] = (),
    add: Sequence[NewSequence] = (),
    chunks: Sequence[tuple[int, int]] = (),
    decode: bool = False,
) -> StepRequest:
    """One step, in wire form; chunks are (sequence, prompt tokens)."""
    return StepRequest(
        step=step,
        retire=retire,
        add=add,
        chunk_ids=[id for id, _ in chunks],
        chunk_tokens=[tokens for _, tokens in chunks],
        decode=decode,
    )


def mistake_in(reply: StepReply, step: int, vocab_size: int) -> str | None:
    """What no sound shard answers to a step; None where there is nothing of the kind."""
    if reply.step != step:
        return f"answered step {reply.step} when step {step} was due"
    num_tokens, num_tops = len(reply.ids), sum(reply.top_counts)
    columns = (len(reply.token_ids), len(reply.logprobs), len(reply.top_counts))
    if columns != (num_tokens,) * 3 or (len(reply.top_ids), len(reply.top_logprobs)) != (num_tops,) * 2:
        return f"answered step {reply.step} with columns of different lengths"
    if num_tokens and max(reply.token_ids) >= vocab_size:
        return f"generated token {max(reply.token_ids)} of a vocabulary of {vocab_size}"
    for prompt in reply.prompt:
        num_top = len(prompt.top_ids)
        if num_top != len(prompt.top_logprobs) or num_top % (len(prompt.logprobs) or num_top or 1):
            return f"answered step {reply.step} with candidates of a prompt that are not as many for each token"
    return None
