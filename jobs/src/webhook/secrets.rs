//! File with the webhook secrets of tenants.
//!
//! Each line has a tenant and one or more of its secrets, separated by spaces; `#` begins a comment. A plain list and not
//! TOML: problems of configuration files may show the values of keys, and those of this file must not.

use super::signature::WebhookSecret;
use std::collections::BTreeMap;

/// Secrets of a tenant that are valid at the same time. Each adds a signature to every message; two suffice to replace one.
const SECRETS_MAX: usize = 8;
/// Longest name of a tenant that a message shows.
const NAME_CHARS_MAX: usize = 64;

/// Webhook secrets of tenants.
#[derive(Debug, Clone, Default)]
pub struct WebhookSecrets(BTreeMap<String, Vec<WebhookSecret>>);

impl WebhookSecrets {
    /// Parses a file.
    ///
    /// # Errors
    ///
    /// Every problem with its line, and without a secret.
    pub fn parse(text: &str) -> Result<WebhookSecrets, Vec<String>> {
        let (mut secrets, mut problems) = (BTreeMap::<String, Vec<WebhookSecret>>::new(), Vec::new());
        for (line, written) in (1..).zip(text.lines()) {
            let written = written.split('#').next().unwrap_or_default();
            let mut words = written.split_whitespace();
            let Some(tenant) = words.next() else { continue };
            let words: Vec<&str> = words.collect();
            if tenant.starts_with("whsec_") {
                problems.push(format!("line {line}: begins with a secret; write TENANT SECRET"));
                continue;
            }
            let name: String = tenant.chars().take(NAME_CHARS_MAX).collect();
            if words.is_empty() {
                problems.push(format!("line {line}: tenant `{name}` has no secret; write TENANT SECRET"));
            }
            let known = secrets.entry(tenant.to_owned()).or_default();
            for (number, word) in (1..).zip(words) {
                match word.parse() {
                    Ok(secret) => known.push(secret),
                    Err(problem) => {
                        problems.push(format!("line {line}: secret {number} of tenant `{name}`: {problem}"));
                    }
                }
            }
            if known.len() > SECRETS_MAX {
                let count = known.len();
                problems.push(format!(
                    "line {line}: tenant `{name}` has {count} secrets, more than {SECRETS_MAX}; remove old ones"
                ));
            }
        }
        if problems.is_empty() { Ok(WebhookSecrets(secrets)) } else { Err(problems) }
    }

    /// Returns the secrets of a tenant.
    pub fn of(&self, tenant: &str) -> &[WebhookSecret] {
        self.0.get(tenant).map_or(&[], Vec::as_slice)
    }

    /// Returns the number of tenants.
    pub fn tenants(&self) -> usize {
        self.0.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

    #[test]
    fn a_tenant_has_the_secrets_of_all_its_lines() {
        let text = format!("# receivers\n\nacme {SECRET} {SECRET} # two\r\nother\t{SECRET}\nacme {SECRET}\n");
        let secrets = WebhookSecrets::parse(&text).unwrap();
        assert_eq!(secrets.tenants(), 2);
        assert_eq!(["acme", "other", "none"].map(|tenant| secrets.of(tenant).len()), [3, 1, 0]);
        assert_eq!(WebhookSecrets::parse("").unwrap().tenants(), 0);
    }

    #[test]
    fn every_mistake_is_reported_with_its_line_and_without_the_secret() {
        let many = format!("many {}", [SECRET; 9].join(" "));
        let text = format!("acme\nacme {SECRET} secret\n{SECRET}\nother whsec_MfKQ9r8G\n{many}\n");
        let problems = WebhookSecrets::parse(&text).unwrap_err();
        let expected = [
            "line 1: tenant `acme` has no secret; write TENANT SECRET",
            "line 2: secret 2 of tenant `acme`: not a webhook secret; write `whsec_` and 24 to 64 bytes in base64",
            "line 3: begins with a secret; write TENANT SECRET",
            "line 4: secret 1 of tenant `other`: the webhook secret has 6 bytes; write `whsec_` and 24 to 64 bytes in base64",
            "line 5: tenant `many` has 9 secrets, more than 8; remove old ones",
        ];
        assert_eq!(problems, expected);
    }
}
