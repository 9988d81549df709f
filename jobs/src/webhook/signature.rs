//! Signatures of Standard Webhooks: HMAC-SHA256 of `id.timestamp.body`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::hmac;

/// Prefix of a secret's text.
const SECRET_PREFIX: &str = "whsec_";
/// Bytes of a secret, by the specification.
const SECRET_BYTES: std::ops::RangeInclusive<usize> = 24..=64;

/// Secret of a tenant, with which its webhooks are signed.
#[derive(Clone)]
pub struct WebhookSecret(hmac::Key);

impl std::fmt::Debug for WebhookSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WebhookSecret(…)")
    }
}

impl std::str::FromStr for WebhookSecret {
    type Err = String;

    fn from_str(text: &str) -> Result<WebhookSecret, String> {
        let expected = "write `whsec_` and 24 to 64 bytes in base64";
        let encoded =
            text.strip_prefix(SECRET_PREFIX).ok_or_else(|| format!("not a webhook secret; {expected}"))?;
        let secret =
            STANDARD.decode(encoded).map_err(|_| format!("the webhook secret is not base64; {expected}"))?;
        if !SECRET_BYTES.contains(&secret.len()) {
            return Err(format!("the webhook secret has {} bytes; {expected}", secret.len()));
        }
        Ok(WebhookSecret(hmac::Key::new(hmac::HMAC_SHA256, &secret)))
    }
}

/// Returns the value of `webhook-signature`: one signature for each live secret, so that a receiver can replace its secret
/// without a rejected message. `timestamp` is in seconds since the Unix epoch.
pub fn sign(secrets: &[WebhookSecret], id: &str, timestamp: u64, body: &[u8]) -> String {
    let head = format!("{id}.{timestamp}.");
    let signatures = secrets.iter().map(|WebhookSecret(key)| {
        let mut context = hmac::Context::with_key(key);
        context.update(head.as_bytes());
        context.update(body);
        format!("v1,{}", STANDARD.encode(context.sign()))
    });
    signatures.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Example of the specification's reference implementation.
    #[test]
    fn signatures_are_those_of_the_reference() {
        let secret: WebhookSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse().unwrap();
        let (id, body) = ("msg_p5jXN8AQM9LWM0D4loKWxJek", br#"{"test": 2432232314}"#);
        let expected = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";
        assert_eq!(sign(std::slice::from_ref(&secret), id, 1614265330, body), expected);
        let other = format!("whsec_{}", STANDARD.encode([7; 32])).parse().unwrap();
        let two = sign(&[other, secret], id, 1614265330, body);
        assert_eq!(two.split(' ').count(), 2);
        assert!(two.ends_with(expected));
        assert_eq!(sign(&[], id, 1, body), "");
    }

    #[test]
    fn other_texts_are_no_secrets_and_no_secret_is_printed() {
        let secret = format!("whsec_{}", STANDARD.encode([1; 24]));
        assert_eq!(format!("{:?}", secret.parse::<WebhookSecret>().unwrap()), "WebhookSecret(…)");
        let texts = [
            String::new(),
            secret[6..].to_owned(),
            "whsec_!".to_owned(),
            format!("whsec_{}", STANDARD.encode([1; 23])),
        ];
        for text in texts {
            let problem = text.parse::<WebhookSecret>().unwrap_err();
            assert!(problem.ends_with("write `whsec_` and 24 to 64 bytes in base64"), "{problem}");
        }
    }
}
