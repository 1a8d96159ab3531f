"""Names of the Redis functions in `functions.lua`."""

from __future__ import annotations

ACQUIRE, RENEW, RELEASE = "foray_acquire", "foray_renew", "foray_release"
META, RESET = "foray_meta", "foray_reset"
ISSUE, REISSUE, RETRY = "foray_issue", "foray_reissue", "foray_retry"
BEAT, PUBLISH, ACK, TARGET, VIEW = "foray_beat", "foray_publish", "foray_ack", "foray_target", "foray_view"
REGISTER, REPORT = "foray_register", "foray_report"
CENSUS, UNREAD, TOKENS_OF = "foray_census", "foray_unread", "foray_tokens_of"
LIBRARY = "foray"
