"""What this stack adds to a bare vLLM server, beside what `ray.serve.llm` adds.

`servers` starts and ends the four servers, `processes` knows whose CPU time is whose,
`measure` runs the interleaved rounds, `report` condenses and prints them. `ray_llm` is a
program of its own: the only module here that imports Ray.
"""
