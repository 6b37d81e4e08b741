"""Benchmarks of Triptych; ``python -m benchmarks`` runs them. They need nothing but the repository.

load.py           one measurement: requests over HTTP, percentiles, CPU of the servers
loadgen.c         what makes the requests
bare_server.py    the floor: an aiohttp loop with no tokenizer and no worker
servers.py        starts and stops servers, pins them to cores
frontend_cost.py  CPU of the frontend beside the bare loop
engine_speed.py   the torch engine beside sequential transformers.generate
ttft.py           what E/P/D adds to the time to first token
preprocess.py     a JPEG to patches beside the stock processor, and the decode pool
video_sampling.py the frames that are wanted beside all of them; sound to its spectrum
embedding_cache.py  pictures that come again, with the cache and without
kv_index.py       the frontend's index of cached blocks: time of a lookup, and memory
routing.py        conversations about pictures over four workers, by every routing
agent_loop.py     agents with screenshots and tools in E/P/D, by --routing kv
best_cached.py    the most tokens that a prefix cache could have given to them
media_flood.py    text-only streams beside a flood of large pictures
flood.py          what makes the flood
pictures.py       pictures from a seed, as hard to compress as photographs
record.py         results as JSON with machine and commit, and the table in docs/
"""
