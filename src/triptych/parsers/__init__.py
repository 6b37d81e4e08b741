"""Parts of a model's output: reasoning, tool calls, and the content that is left.

Pure text: knows neither the API's structs nor tokens. ``registry`` lists the formats.
"""
