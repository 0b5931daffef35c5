"""BLAKE2, RFC 7693, without the rest of `hashlib`, which brings OpenSSL: 1.2 MiB of every worker, for hashes that are not
asked for here."""

from __future__ import annotations

try:
    # As the standard library's `random` has its SHA-512.
    from _blake2 import blake2b
except ImportError:  # an interpreter that keeps it elsewhere
    from hashlib import blake2b

__all__ = ["blake2b"]
