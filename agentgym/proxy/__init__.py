"""An OpenAI-compatible endpoint over an engine that records exact tokens: any agent is evaluated and trained unchanged.

`Recorder` turns the requests of one session into token records; `ProxyServer` speaks HTTP.
"""
