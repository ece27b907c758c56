"""Groups in the making."""

from __future__ import annotations

from collections.abc import Sequence

from lit_grpo.scheduling.jobs import Job
from lit_grpo.types import Completion, GroupKey, Key, Prompt, Request, Rollout, RolloutGroup, SamplePath, SamplingParams


class GroupAssembly:
    """The requests of a rollout, and what has come of them: a group comes out once, when its last completion arrives.

    Raises:
        ValueError: The same visit of a prompt is there twice.
    """

    def __init__(self, prompts: Sequence[Prompt], num_generations: int, sampling: SamplingParams, seed: int) -> None:
        self.in_flight: set[Key] = set()
        self._prompts = {(prompt.prompt_id, prompt.visit): prompt for prompt in prompts}
        if len(self._prompts) != len(prompts):
            raise ValueError("A batch holds the same visit of a prompt twice; give its rows distinct prompt ids.")
        self._sampling, self._seed = sampling, seed
        self.num_generations = num_generations
        self._unadmitted = dict.fromkeys(self._prompts, num_generations)
        self._completions: dict[GroupKey, dict[SamplePath, Completion]] = {key: {} for key in self._prompts}
        self._groups: dict[GroupKey, RolloutGroup] = {}

    @property
    def done(self) -> bool:
        """Whether all groups are whole."""
        return len(self._groups) == len(self._prompts)

    @property
    def prompts(self) -> list[Prompt]:
        """One a group."""
        return list(self._prompts.values())

    @property
    def jobs(self) -> list[Job]:
        """All requests, as plans see them."""
        most, samples = self._sampling.max_tokens, range(self.num_generations)
        prompts = self._prompts.items()
        return [Job((*key, (n,)), len(prompt.token_ids), most) for key, prompt in prompts for n in samples]

    def admit(self, jobs: Sequence[Job]) -> tuple[list[Request], list[Prompt]]:
        """Note what is in flight; return its requests, and the prompts of which no request is left to admit."""
        requests = [Request(self._prompts[job.group], job.key[2], self._sampling, self._seed) for job in jobs]
        complete = []
        for request in requests:
            self.in_flight.add(request.key)
            key = request.key[:2]
            self._unadmitted[key] -= 1
            if not self._unadmitted[key]:
                complete.append(request.prompt)
        return requests, complete

    def set_aside(self, request: Request) -> None:
        """Note that a request waits again."""
        self.in_flight.remove(request.key)
        self._unadmitted[request.key[:2]] += 1

    def finish(self, completion: Completion) -> RolloutGroup | None:
        """Take a completion; return its group if it is whole now."""
        *_, path = request_key = completion.request.key
        self.in_flight.remove(request_key)
        members = self._completions[request_key[:2]]
        members[path] = completion
        if len(members) < self.num_generations:
            return None
        prompt = completion.request.prompt
        group = RolloutGroup(prompt, [Rollout(prompt, members[sample]) for sample in sorted(members)])
        self._groups[request_key[:2]] = group
        del self._completions[request_key[:2]]
        return group

    def groups(self) -> list[RolloutGroup]:
        """Return the whole groups in the order of the prompts."""
        return [self._groups[key] for key in self._prompts]


def job_of(request: Request) -> Job:
    """Return what plans know of a request."""
    return Job(request.key, len(request.prompt.token_ids), request.sampling.max_tokens)
