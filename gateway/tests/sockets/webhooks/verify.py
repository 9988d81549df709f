"""Verifies recorded webhook messages with the reference verifier.

The argument is a file with a JSON list of messages: `headers`, `body` as text, and `secrets`, each of which must verify it.
"""

import json
import sys

from standardwebhooks.webhooks import Webhook, WebhookVerificationError

OTHER = "whsec_" + "A" * 32

with open(sys.argv[1], encoding="utf-8") as file:
    messages = json.load(file)
for message in messages:
    headers, body = message["headers"], message["body"]
    for secret in message["secrets"]:
        event = Webhook(secret).verify(body, headers)
        assert event["data"]["id"] == headers["webhook-id"], event
    for secret, changed in [(OTHER, body), (message["secrets"][0], body + " ")]:
        try:
            Webhook(secret).verify(changed, headers)
        except WebhookVerificationError:
            continue
        raise SystemExit(f"a message that was changed, or signed with another secret, was accepted: {headers}")
print(f"{len(messages)} messages are verified")
