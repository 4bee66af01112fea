"""From published interaction logs to a memory-mapped store that every rank shares.

`readers` names the files and their columns, `prepare` filters and sorts them out of core (DuckDB), `k_core` prunes,
`store` is the on-disk form, `synthetic` writes KuaiRand-format logs of any size.
"""
