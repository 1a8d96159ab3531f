"""Tasks out and groups in: lease, issuer, consumer, accounting, audits. Everything that touches Redis."""
