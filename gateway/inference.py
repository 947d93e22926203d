"""The one model as both protocols see it, and whether it can be used now."""

from gateway.generation import Generation
from gateway.generations import Generations
from gateway.intake import Intake
from gateway.metrics import Metrics
from gateway.spec import InferenceRequest
from headrace.errors import HeadraceError, PeerUnavailable


class Inference:
    """Takes requests of either protocol."""

    def __init__(self, *, intake: Intake, generations: Generations, metrics: Metrics) -> None:
        self._intake = intake
        self._generations = generations
        self._metrics = metrics

    @property
    def model_name(self) -> str:
        """The served model."""
        return self._intake.model_name

    @property
    def max_context_tokens(self) -> int:
        """Tokens of prompt and output together, at most."""
        return self._intake.max_length

    async def generate(self, request: InferenceRequest) -> Generation:
        """Check, admit and start a request.

        Raises:
            HeadraceError: Why it is refused; nothing was started.
        """
        try:
            return await self._generations.submit(await self._intake.spec(request))
        except HeadraceError as error:
            self._metrics.observe_failure(error)
            raise

    def cancel(self, request_id: str) -> bool:
        """Cancel a request; False when no such request is live."""
        return self._generations.cancel(request_id)

    def check_model(self, name: str) -> None:
        """Raise UnknownModel for a model that is not served."""
        self._intake.check_model(name)

    def render_metrics(self) -> bytes:
        """What Prometheus scrapes."""
        return self._metrics.render()


class Readiness:
    """Holds the Inference while requests may come in."""

    def __init__(self) -> None:
        self._inference: Inference | None = None
        self._reason = "the gateway is starting: try again in a moment"

    @property
    def inference(self) -> Inference:
        """The model; raises PeerUnavailable while the gateway starts or shuts down."""
        if self._inference is None:
            raise PeerUnavailable(self._reason)
        return self._inference

    def open(self, inference: Inference) -> None:
        """Requests may come in from now on."""
        self._inference = inference

    def close(self) -> None:
        """No new requests from now on."""
        self._inference = None
        self._reason = "the gateway is shutting down: send the request to another one"
