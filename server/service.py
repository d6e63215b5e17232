"""The gRPC face of an engine: protobuf in, engine, protobuf out.

All work on the model runs on one compute thread, in the order in which it arrived, so that every rank issues the same
collectives in the same order. A second thread waits for the device and builds replies, so that the compute thread can
launch the next step meanwhile. `Info` and `Health` are answered by the event loop and touch nothing of the model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

import grpc
import torch

from server.adapters.adapters import Adapters
from server.adapters.config import AdapterError, AdapterUnreadable
from server.adapters.identity import is_content
from server.backends.device import StepProfiler, lost_device
from server.blocks import BLOCK_SIZE, num_blocks
from server.offload.cost import Times
from server.pb import generate_pb2 as pb
from server.pb import generate_pb2_grpc as pb_grpc
from server.prefix.mover import Move, Tiers
from server.prefix.prefix_file import KEY_BYTES
from server.ranks.collectives import PeerLost
from server.ranks.relay import RankPlace, StepStream, shard_server
from server.stepping.engine import Engine, Launched, StepResult
from server.stepping.sequences import StepError
from server.stepping.warmup import warm_up

log = logging.getLogger(__name__)

# What a shard that is warm can serve less of, not more. The size of its KV cache is as it is: another router wants the
# settings', and shards that replaced lost ones found less memory free.
WARM_FOR = ("max_batch_prefill_tokens", "max_total_tokens", "max_top_n_tokens", "max_sequences")
MOST_SEQUENCES = 65536  # more than any router admits at once; the device's tables have a row for each


class ShardService(pb_grpc.ShardServicer):
    """Serves one engine. `failed` is set to the reason when the ranks can no longer be in step.

    step_sockets: where ranks 1, 2 and so on take their steps from rank 0; tiers: those of the prefix cache, if any;
    ranks: this one's place among all, where there are more than those of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        info: pb.InfoReply,
        cuda_memory_fraction: float,
        step_sockets: Sequence[str] = (),
        tiers: Tiers | None = None,
        ranks: RankPlace | None = None,
    ):
        self._ranks = ranks or RankPlace(engine.shard.rank, engine.shard.world_size)
        self._engine = engine
        self._info = info
        self._fraction = cuda_memory_fraction
        self._tiers = tiers
        self._profiler = StepProfiler(engine.device)
        activate = engine.device.activate
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=activate)
        self._finish = ThreadPoolExecutor(1, thread_name_prefix="finish", initializer=activate)
        self._reading = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._readers: dict[bytes, object] = {}  # the last call that asked for an adapter, while it is read
        self._arrivals: list[float] = []  # when each unfinished step arrived, oldest first
        self._received = 0
        self._num_waited_for = 0  # steps that the device computes, and a thread waits for
        self._warmed: tuple[pb.WarmupRequest, pb.WarmupReply] | None = None
        self.steps = StepStream(self._ranks.rank, step_sockets, self._start, speaker=self._ranks.speaker)
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.InfoReply:
        """What was loaded. Touches nothing of the model."""
        self._info.num_blocks = self._engine.num_blocks
        return self._info

    async def Health(self, request: pb.HealthRequest, context: grpc.aio.ServicerContext) -> pb.HealthReply:
        """How far the stream of steps is, and how old its oldest step. Touches nothing of the model."""
        age = time.monotonic() - self._arrivals[0] if self._arrivals else 0.0
        return pb.HealthReply(
            steps_received=self._received,
            steps_finished=self._received - len(self._arrivals),
            oldest_step_ms=int(age * 1000),
            collectives=self._engine.shard.progress.begun,
            activity=self._engine.activity(),
            stage=self._engine.neighbours.stage.index,
        )

    async def Warmup(self, request: pb.WarmupRequest, context: grpc.aio.ServicerContext) -> pb.WarmupReply:
        """Make the engine ready, once; then answer as before. INVALID_ARGUMENT says which limit does not fit."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._compute, self._warm_up, request)
        except ValueError as error:
            status, text = grpc.StatusCode.INVALID_ARGUMENT, str(error)
        except (RuntimeError, MemoryError) as error:
            self._fail(error)
            status, text = grpc.StatusCode.INTERNAL, _sentence(error)
        except Exception as error:  # compilers of kernels have errors of their own: the reply ends the start with them
            log.exception("the warm-up failed")
            status, text = grpc.StatusCode.INTERNAL, _sentence(error)
            self._fail(RuntimeError(text))
        await context.abort(status, text)
        raise AssertionError("abort raises")

    def _warm_up(self, request: pb.WarmupRequest) -> pb.WarmupReply:
        if self._warmed is None:
            self._warmed = (request, self._first_warm_up(request))
        first, reply = self._warmed
        for name in WARM_FOR:
            warm, wanted = getattr(first, name), getattr(request, name)
            may_be_less = name == "max_total_tokens" and request.may_be_shorter  # the reply says what there is room for
            if wanted > warm and not may_be_less:
                raise ValueError(f"{name} is {wanted}, but this shard is warm for {warm}: restart the server")
        return reply

    def _first_warm_up(self, request: pb.WarmupRequest) -> pb.WarmupReply:
        engine = self._engine
        if not (request.max_batch_prefill_tokens and request.max_total_tokens):
            raise ValueError("max_batch_prefill_tokens and max_total_tokens are 0: they must be at least 1")
        if request.max_sequences > MOST_SEQUENCES:
            raise ValueError(f"max_sequences is {request.max_sequences}, but a shard has room for {MOST_SEQUENCES}")
        warmed = warm_up(
            engine,
            prefill_tokens=request.max_batch_prefill_tokens,
            total_tokens=request.max_total_tokens,
            wanted_tokens=request.max_batch_total_tokens,
            useful_tokens=request.useful_tokens,
            top_n_tokens=request.max_top_n_tokens,
            sequences=request.max_sequences,
            fraction=self._fraction,
            host_bytes=self._tiers.config.host_bytes if self._tiers is not None else 0,
            may_be_shorter=request.may_be_shorter,
        )
        if warmed.products and engine.shard.rank == 0:
            log.info("Products that were measured:\n  %s", "\n  ".join(warmed.products))
        ring = engine.kv_shape.ring
        state_bytes = engine.kv_shape.bytes_of_sequences(warmed.num_states) if warmed.num_states else 0
        on_device = engine.kv_placement.device_bytes + state_bytes
        sharing = engine.shard.sharing
        return pb.WarmupReply(
            max_batch_total_tokens=warmed.tokens,
            block_size=BLOCK_SIZE,
            num_blocks=engine.num_blocks,
            kv_bytes=engine.num_blocks * engine.kv_shape.bytes_per_block,
            free_bytes=engine.device.left_bytes(fraction=self._fraction, world_size=sharing, kv_bytes=on_device),
            step_bytes=warmed.step_bytes,
            graph_bytes=warmed.graph_bytes,
            captured=warmed.captured,
            products=warmed.products,
            clocks=warmed.clocks,
            pads_chunks=engine.pads_chunks,
            kv_offloaded=engine.kv_placement.offloaded,
            max_total_tokens=warmed.total_tokens,
            step_seconds=warmed.prompt_times.step,
            token_seconds=warmed.prompt_times.token,
            num_states=warmed.num_states,
            checkpoint_blocks=engine.checkpoint_blocks,
            state_bytes=state_bytes,
            window_blocks=ring.window_blocks if ring is not None else 0,
            most_at_once=ring.most_at_once if ring is not None else 0,
            kv_bytes_per_token=engine.kv_shape.bytes_per_token,
        )

    async def OpenTiers(self, request: pb.OpenTiersRequest, context: grpc.aio.ServicerContext) -> pb.OpenTiersReply:
        """Begin a session of the prefix cache's tiers. FAILED_PRECONDITION where there are none, or no warm-up yet."""
        if self._tiers is None or self._warmed is None:
            sentence = "this shard's prefix cache has no tiers" if self._tiers is None else "warm up first"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, sentence)
            raise AssertionError("abort raises")
        opening = asyncio.get_running_loop().run_in_executor(self._compute, self._open_tiers, self._tiers, request)
        try:
            return await opening
        except (RuntimeError, MemoryError) as error:
            self._fail(error)
            text = _sentence(error)
        await context.abort(grpc.StatusCode.INTERNAL, text)
        raise AssertionError("abort raises")

    def _open_tiers(self, tiers: Tiers, request: pb.OpenTiersRequest) -> pb.OpenTiersReply:
        assert self._warmed is not None
        block_bytes = BLOCK_SIZE * self._engine.kv_shape.bytes_per_token
        count = tiers.num_slots(block_bytes, num_blocks(self._warmed[0].max_total_tokens))
        slots, has_rings = self._engine.open_slots(count, tiers.session), self._engine.kv_shape.ring is not None
        contents = tiers.open(slots, request.session, has_rings=has_rings)
        return pb.OpenTiersReply(
            num_slots=contents.num_slots,
            num_places=contents.num_places,
            block_bytes=contents.block_bytes,
            places=contents.entries,
            keys=b"".join(entry.key for entry in contents.entries.values()),
            stamps=[entry.stamp for entry in contents.entries.values()],
            trouble=contents.trouble,
        )

    async def MoveBlocks(self, request: pb.MoveBlocksRequest, context: grpc.aio.ServicerContext) -> pb.MoveBlocksReply:
        """Move blocks between host and disk. Touches nothing of the model."""
        count = len(request.slots)
        columns = (
            len(request.places),
            len(request.keys) / KEY_BYTES,
            count if request.is_fetch else len(request.stamps),
        )
        if self._tiers is None or columns != (count,) * 3:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"there are no tiers, or not {count} blocks: {columns}"
            )
            raise AssertionError("abort raises")
        moved = await self._tiers.move(
            Move(
                session=request.session,
                after_step=request.after_step,
                is_fetch=request.is_fetch,
                slots=list(request.slots),
                places=list(request.places),
                keys=request.keys,
                stamps=list(request.stamps),
            )
        )
        if moved.trouble:
            log.warning("%s", moved.trouble)
        return pb.MoveBlocksReply(**asdict(moved))

    async def PrepareAdapter(
        self, request: pb.PrepareAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.PrepareAdapterReply:
        """Read an adapter's files, or forget them, beside the steps."""
        if (adapters := self._engine.adapters) is None:
            return pb.PrepareAdapterReply(problem="this server was started without adapters")
        if request.folder:
            return await self._prepared(adapters, request.key, Path(request.folder))
        if request.key:
            adapters.forget(request.key)
        else:
            adapters.forget_all_but({*request.kept})
        return pb.PrepareAdapterReply()

    async def _prepared(self, adapters: Adapters, key: bytes, folder: Path) -> pb.PrepareAdapterReply:
        reader = self._readers[key] = object()
        reading = asyncio.get_running_loop().run_in_executor(self._reading, _prepare, adapters, key, folder)
        try:
            reply = await reading
        except asyncio.CancelledError:  # whoever asked has gone, or waits no longer
            self._reading.submit(self._forget_unwanted, adapters, key, reader)
            raise
        if self._readers.get(key) is reader:
            del self._readers[key]
        return reply

    def _forget_unwanted(self, adapters: Adapters, key: bytes, reader: object) -> None:
        if self._readers.get(key) is reader:
            del self._readers[key]
            adapters.forget(key)

    async def Profile(self, request: pb.ProfileRequest, context: grpc.aio.ServicerContext) -> pb.ProfileReply:
        """Start a profile of the compute thread, or end it and say where its time went."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._compute, self._profile, request)
        except (ValueError, RuntimeError, OSError) as error:
            text = _sentence(error)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        raise AssertionError("abort raises")

    def _profile(self, request: pb.ProfileRequest) -> pb.ProfileReply:
        if request.start:
            self._profiler.start()
            return pb.ProfileReply()
        times = self._profiler.stop(request.trace_path)
        return pb.ProfileReply(
            names=[t.name for t in times], calls=[t.calls for t in times], self_ns=[t.self_ns for t in times]
        )

    async def Streamed(self, request: pb.StreamedRequest, context: grpc.aio.ServicerContext) -> pb.StreamedReply:
        """What the link and the streamed layers did when; answered between two steps."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, self._streamed, request)

    def _streamed(self, request: pb.StreamedRequest) -> pb.StreamedReply:
        times = self._engine.times
        if times is None:
            return pb.StreamedReply()
        reply = _streamed_reply(times)
        if request.forget:
            times.forget()
        return reply

    async def Run(
        self, requests: AsyncIterator[pb.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepReply]:
        """The ordered stream of steps: reply k answers request k, and carries an error where step k failed."""
        async for reply in self.steps.run(requests):
            yield reply

    def _start(self, request: pb.StepRequest) -> asyncio.Task[pb.StepReply]:
        """Queue a step behind those before it."""
        self._received += 1
        self._arrivals.append(time.monotonic())
        launched = asyncio.get_running_loop().run_in_executor(self._compute, self._engine.launch, request)
        replying = asyncio.create_task(self._reply(request.step, launched))
        if self._tiers is not None:
            noting = partial(self._tiers.session.finished, request.tier_session, request.step)
            replying.add_done_callback(lambda _: noting())
        return replying

    async def _reply(self, step: int, launched: asyncio.Future[Launched | None]) -> pb.StepReply:
        # After a failed launch one rank goes on without that step's sequences; several are no longer in step, and a
        # device that fails later, or for good, has lost everything.
        is_fatal = self._ranks.count > 1
        try:
            running = await launched
            if running is None:
                return pb.StepReply(step=step)
            is_fatal = True
            result = await self._finished(running)
            speaks = self._ranks.rank == self._ranks.speaker
            return to_reply(step, result) if speaks else pb.StepReply(step=step)
        except Exception as error:  # this loop must outlive a step: the error is the reply
            is_ours = not isinstance(error, PeerLost)  # what another shard went through is told by that one
            log.error("step %d failed: %s", step, _sentence(error), exc_info=is_ours)
            reply = pb.StepReply(step=step, error=_sentence(error), lost_peer=isinstance(error, PeerLost))
            # What every rank refuses alike leaves them in step.
            if (is_fatal and not isinstance(error, StepError)) or lost_device(error):
                reply.failed_rank = self._ranks.rank
                self._fail(error)
            return reply
        finally:
            self._arrivals.pop(0)

    async def _finished(self, running: Launched) -> StepResult:
        """The step's result; waited for by a thread of its own, unless there is nothing to wait for.

        One after the other: what a step has found is noted behind what those before it have.
        """
        if running.is_done and not self._num_waited_for:
            return running.finish()
        self._num_waited_for += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._finish, running.finish)
        finally:
            self._num_waited_for -= 1

    async def close(self) -> None:
        """Give back graphs and KV cache, behind the last step, and wait until the device has let go of them."""
        await asyncio.get_running_loop().run_in_executor(self._compute, self._release)

    def _release(self) -> None:
        if self._tiers is not None:
            self._tiers.close()
        self._engine.release()
        self._engine.neighbours.close()
        if (end := self._engine.device.event()) is not None:
            end.synchronize()

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(lost_device(error) or error)


def to_reply(step: int, result: StepResult) -> pb.StepReply:
    """The wire's form of what rank 0 computed."""
    reply = pb.StepReply(
        step=step,
        ids=result.ids,
        token_ids=result.token_ids,
        logprobs=result.logprobs,
        top_counts=[len(ids) for ids in result.top_ids],
        top_ids=[id for ids in result.top_ids for id in ids],
        top_logprobs=[value for values in result.top_logprobs for value in values],
        forward_ns=result.forward_ns,
        proposal_ids=[proposal.id for proposal in result.proposals],
        proposal_counts=[len(proposal.token_ids) for proposal in result.proposals],
        proposal_tokens=[token for proposal in result.proposals for token in proposal.token_ids],
        proposal_logprobs=[logprob for proposal in result.proposals for logprob in proposal.logprobs],
        propose_ns=result.propose_ns,
    )
    for id, known in result.prompt.items():
        reply.prompt.add(id=id, logprobs=known.logprobs, top_ids=known.top_ids, top_logprobs=known.top_logprobs)
    return reply


def _streamed_reply(times: Times) -> pb.StreamedReply:
    """The wire's form of what streaming has cost."""
    reads, computed = list(times.reads), list(times.computed)
    return pb.StreamedReply(
        pass_bytes=times.pass_bytes,
        bytes=times.bytes,
        waited_s=times.waited_s,
        read_layers=[span.layer for span in reads],
        read_began_s=[span.began_s for span in reads],
        read_ended_s=[span.ended_s for span in reads],
        computed_layers=[span.layer for span in computed],
        computed_began_s=[span.began_s for span in computed],
        computed_ended_s=[span.ended_s for span in computed],
    )


async def serve(service: ShardService, socket_path: str) -> grpc.aio.Server:
    """Start serving on a unix socket, which exists from then on, after that of its steps."""
    await service.steps.open()
    server = shard_server(service, socket_path)
    await server.start()
    return server


def _prepare(adapters: Adapters, key: bytes, folder: Path) -> pb.PrepareAdapterReply:
    try:
        return pb.PrepareAdapterReply(device_bytes=adapters.prepare(key, folder))
    except AdapterError as error:
        may_pass = isinstance(error, AdapterUnreadable) or not is_content(folder, key)
        return pb.PrepareAdapterReply(problem=str(error), may_pass=may_pass)
    except Exception as error:  # this rank must outlive whatever a file makes a library raise
        log.exception("an adapter could not be read")
        problem = f"it cannot be read ({_sentence(error)}): fetch it again"
        return pb.PrepareAdapterReply(problem=problem, may_pass=isinstance(error, OSError | MemoryError))


def _sentence(error: BaseException) -> str:
    """One line for the client: what failed, without a stack."""
    if isinstance(error, torch.OutOfMemoryError):
        return "the device is out of memory; lower --max-batch-prefill-tokens or --max-batch-total-tokens"
    if isinstance(error, PeerLost):
        return "another shard went away"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
