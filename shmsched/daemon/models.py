"""What clients are told of the models that are served."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from shmsched.daemon.client_link import ClientLink
from shmsched.daemon.engine_link import EngineLink, EngineState
from shmsched.wire import frames
from shmsched.wire.frames import Rewinds


def tell_models(engines: Iterable[EngineLink], clients: Iterable[ClientLink]) -> None:
    """Tell ``clients`` of every model: what all its engines can take and do, and how many are ready. What a session's own engine can,
    they are told with the session."""
    by_model: dict[str, list[EngineLink]] = defaultdict(list)
    for engine in engines:
        if engine.state is EngineState.READY:
            by_model[engine.offer.model].append(engine)
    models = [_model(name, ready) for name, ready in by_model.items()]
    for client in clients:
        gone = client.models_told - by_model.keys()
        for message in [*models, *(frames.Model(0, 0, 0, 0, 0, 0, 0, 0, name, "", ()) for name in gone)]:
            client.tell(message)
        client.models_told = set(by_model)


def _model(name: str, engines: list[EngineLink]) -> frames.Model:
    offer = engines[0].offer
    return frames.Model(
        vocab_size=offer.vocab_size,
        max_sessions=min(2**31 - 1, sum(e.offer.max_sessions for e in engines)),
        max_session_tokens=min(e.offer.max_session_tokens for e in engines),
        max_decode_sequences=min(e.limits.max_decode_sequences for e in engines),
        max_prefill_chunk_size=min(e.limits.max_prefill_chunk_size for e in engines),
        engines=len(engines),
        rewinds=_common([e.rewinds for e in engines]),
        supports_fork=all(e.offer.supports_fork for e in engines),
        model=name,
        tokenizer=offer.tokenizer,
        stop_tokens=offer.stop_tokens,
    )


def _common(rewinds: list[Rewinds]) -> Rewinds:
    """What each of them can do."""
    return next((r for r in (Rewinds.NOWHERE, Rewinds.TO_THE_BEGINNING) if r in rewinds), Rewinds.ANYWHERE)
