"""Sequences and steps in the form of `proto/generate.proto`, and what is wrong with a reply."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from router.drafting.proposals import Proposal
from router.scheduling.adapters import Placed
from router.scheduling.grammar import Continuation, Mask
from router.scheduling.plan import Extension, StepPlan
from router.scheduling.queue import blocks_for
from router.scheduling.request import Entry, ValidRequest
from server.pb import generate_pb2 as pb
from server.pb.generate_pb2 import (
    NewSequence,
    SamplingParameters,
    StepReply,
    StepRequest,
    TokenMask,
)


def new_sequence(
    id: int,
    request: ValidRequest,
    blocks: Sequence[int],
    block_size: int,
    *,
    computed: int = 0,
    generated: Sequence[int] = (),
    forced: Sequence[int] = (),
    lane: int = 0,
    adapter: int = 0,
) -> NewSequence:
    """A sequence in wire form, whose blocks hold the first `computed` of its tokens already.

    blocks: where an encoder reads the prompt, first the encoder's blocks and then the decoder's.
    generated: the tokens that it has got, where it is rebuilt; forced: those that its grammar has come next. lane: its
    micro-batch. adapter: the row of its adapter, 0 for none.
    """
    sampling = request.sampling
    first = blocks_for(len(request.encoder_ids), block_size)
    return NewSequence(
        id=id,
        lane=lane,
        adapter=adapter,
        token_ids=[*request.token_ids, *generated, *forced],
        generated=len(generated) + len(forced),
        forced=len(forced),
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
            is_constrained=request.grammar is not None,
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
    adapters: Sequence[Placed] = (),
    add: Sequence[NewSequence] = (),
    chunks: Sequence[tuple[int, int]] = (),
    decode: bool = False,
    held: Sequence[int] = (),
    extended: Mapping[int, Extension] | None = None,
    drafts: Mapping[int, Extension] | None = None,
    masks: Mapping[int, Sequence[Mask]] | None = None,
) -> StepRequest:
    """One step, in wire form; chunks are (sequence, prompt tokens).

    adapters: what rows get. held: sequences that do not decode; extended: what joins running sequences; drafts: what
    may join them; masks: what sequences may get, behind each token of a draft.
    """
    return StepRequest(
        step=step,
        retire=retire,
        adapters=[pb.AdapterPlace(row=placed.row, key=placed.key) for placed in adapters],
        add=add,
        chunk_ids=[id for id, _ in chunks],
        chunk_tokens=[tokens for _, tokens in chunks],
        decode=decode,
        held=held,
        extend=_extensions(extended or {}),
        drafts=_extensions(drafts or {}),
        masks=_token_masks(masks) if masks else (),
    )


def _extensions(extended: Mapping[int, Extension]) -> list[pb.Extension]:
    return [
        pb.Extension(id=id, position=one.position, token_ids=one.token_ids, came=one.came)
        for id, one in extended.items()
    ]


def planned_request(plan: StepPlan[Entry], block_size: int, tier_session: int = 0) -> StepRequest:
    """A plan in wire form. tier_session: that of the tiers behind the device, 0 where there are none."""
    request = step_request(
        plan.number,
        retire=[*(entry.id for entry in plan.retired), *plan.preempted],
        adapters=plan.adapters,
        add=[
            new_sequence(
                entry.id,
                entry.request,
                entry.blocks,
                block_size,
                computed=plan.cached(entry),
                generated=entry.generated_ids,
                forced=entry.forced,
                lane=entry.lane,
                adapter=entry.row,
            )
            for entry in plan.admitted
        ],
        chunks=list(plan.chunks.items()),
        decode=bool(plan.decoding),
        held=plan.held if plan.decoding else (),
        extended=plan.extended,
        drafts=plan.drafts,
        masks={
            e.id: _masks_of(e.continuation, plan.drafts.get(e.id))
            for e in plan.constrained
            if e.continuation is not None
        },
    )
    request.tier_session, request.lane = tier_session, plan.lane
    if plan.proposals:
        request.proposals = plan.proposals
        request.proposed_ids.extend(plan.proposed)
    for id, blocks in plan.grown.items():
        request.grown_ids.append(id)
        request.grown_counts.append(len(blocks))
        request.grown_blocks.extend(blocks)
    for id, loaded in plan.loaded.items():
        request.loaded_ids.extend([id] * max(1, len(loaded.places)))
        request.loaded_places.extend(loaded.places)
        request.loaded_blocks.extend(loaded.blocks)
    for copy in plan.copies:
        request.copied_ids.append(copy.sequence)
        request.copied_places.append(copy.place)
        request.copied_blocks.extend(copy.blocks)
    for id, blocks in plan.kept.items():
        request.kept_ids.append(id)
        request.kept_blocks.extend(blocks)
    for saved in plan.saves:
        request.saved_blocks.append(saved.block)
        request.saved_slots.append(saved.slot)
    for restored in plan.restores:
        request.restored_slots.append(restored.slot)
        request.restored_blocks.append(restored.block)
    return request


def _masks_of(continuation: Continuation, draft: Extension | None) -> Sequence[Mask]:
    """What a sequence may get behind each token that the step computes of it."""
    num_guesses = 0 if draft is None else len(draft.token_ids) - 1
    return [continuation.mask, *continuation.drafted[:num_guesses]]


def _token_masks(masks: Mapping[int, Sequence[Mask]]) -> list[TokenMask]:
    """Each mask once, with all sequences and rows of drafts that it is for."""
    by_mask: dict[Mask, list[tuple[int, int]]] = {}
    for id, of_rows in masks.items():
        for row, mask in enumerate(of_rows):
            by_mask.setdefault(mask, []).append((id, row))
    return [token_mask(mask, places) for mask, places in by_mask.items()]


def token_mask(mask: Mask, places: Sequence[tuple[int, int]]) -> TokenMask:
    """A mask in wire form, for these sequences and rows of drafts."""
    rows = [row for _, row in places]
    found = TokenMask(ids=[id for id, _ in places], rows=rows if any(rows) else ())
    if mask.allowed is not None:
        found.allowed.ids.extend(mask.allowed)
        found.allowed.SetInParent()
    elif mask.forbidden is not None:
        found.forbidden.ids.extend(mask.forbidden)
        found.forbidden.SetInParent()
    else:
        assert mask.bits is not None
        found.bits = mask.bits
    return found


def mistake_in_step(reply: StepReply, plan: StepPlan[Entry], vocab_size: int) -> str | None:
    """What no sound shard answers to this step; None where there is nothing of the kind."""
    if mistake := mistake_in(reply, plan.number, vocab_size, plan.drafts):
        return mistake
    came = set(reply.ids)
    if came != plan.concerned.keys() and not reply.error and (mistake := _mistake_in_sequences(came, plan)):
        return mistake
    if reply.proposal_ids or reply.proposal_counts:
        return _mistake_in_proposals(reply, vocab_size, plan.proposals, plan.proposed)
    return None


def mistake_in(reply: StepReply, step: int, vocab_size: int, drafts: Mapping[int, Extension]) -> str | None:
    """The same by the reply and these drafts alone."""
    if reply.step != step:
        return f"answered step {reply.step} when step {step} was due"
    num_tokens, num_tops = len(reply.ids), sum(reply.top_counts)
    columns = (len(reply.token_ids), len(reply.logprobs), len(reply.top_counts))
    if columns != (num_tokens,) * 3 or (len(reply.top_ids), len(reply.top_logprobs)) != (num_tops,) * 2:
        return f"answered step {reply.step} with columns of different lengths"
    if num_tokens and max(reply.token_ids) >= vocab_size:
        return f"generated token {max(reply.token_ids)} of a vocabulary of {vocab_size}"
    if len(set(reply.ids)) < num_tokens and (mistake := _mistake_in_drafted(reply, drafts)):
        return mistake
    for prompt in reply.prompt:
        num_top = len(prompt.top_ids)
        if num_top != len(prompt.top_logprobs) or num_top % (len(prompt.logprobs) or num_top or 1):
            return f"answered step {reply.step} with candidates of a prompt that are not as many for each token"
    return None


def _mistake_in_sequences(came: set[int], plan: StepPlan[Entry]) -> str | None:
    """The same of those that got tokens. Who left meanwhile, under the id that it had, need not be there."""
    for id in came - plan.concerned.keys():
        return f"answered step {plan.number} with a token of sequence {id}, which it did not compute"
    for id in plan.concerned.keys() - came:
        if plan.concerned[id].id == id and plan.gives_token(id):
            return f"answered step {plan.number} without a token of sequence {id}"
    return None


def _mistake_in_drafted(reply: StepReply, drafts: Mapping[int, Extension]) -> str | None:
    """The same of sequences with several tokens: all but the last are what was guessed."""
    came: dict[int, list[int]] = {}
    for id, token_id in zip(reply.ids, reply.token_ids, strict=True):
        came.setdefault(id, []).append(token_id)
    for id, token_ids in came.items():
        known = drafts[id].token_ids if id in drafts else [0]  # its latest token, and guesses
        if (count := len(token_ids)) > len(known):
            return f"answered step {reply.step} with {count} tokens of sequence {id}, which could get {len(known)}"
        if token_ids[:-1] != list(known[1 : len(token_ids)]):
            return f"answered step {reply.step} with tokens behind a guess of sequence {id} that was wrong"
    return None


def _mistake_in_proposals(reply: StepReply, vocab_size: int, most: int, asked: Collection[int]) -> str | None:
    """The same of what a speculative model proposes."""
    ids, counts, token_ids = reply.proposal_ids, reply.proposal_counts, reply.proposal_tokens
    columns = (len(counts), len(token_ids), len(reply.proposal_logprobs))
    if columns != (len(ids), sum(counts), sum(counts)):
        return f"answered step {reply.step} with proposals in columns of different lengths"
    if len(set(ids)) < len(ids) or not set(ids) <= set(asked):
        return f"answered step {reply.step} with proposals for sequences that were not asked about, or twice"
    if max(counts, default=0) > most:
        return f"answered step {reply.step} with {max(counts)} proposals for a sequence, and {most} were asked for"
    if token_ids and max(token_ids) >= vocab_size:
        return f"proposed token {max(token_ids)} of a vocabulary of {vocab_size}"
    if any(map(math.isnan, reply.proposal_logprobs)):
        return f"answered step {reply.step} with proposals that have no probability"
    return None


def proposals_of(reply: StepReply) -> dict[int, Proposal]:
    """What is proposed for each sequence."""
    found: dict[int, Proposal] = {}
    end = 0
    for id, count in zip(reply.proposal_ids, reply.proposal_counts, strict=True):
        start, end = end, end + count
        found[id] = Proposal(tuple(reply.proposal_tokens[start:end]), tuple(reply.proposal_logprobs[start:end]))
    return found
