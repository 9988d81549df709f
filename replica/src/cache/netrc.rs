//! User and password of a host in a `.netrc` file, as curl reads it.

/// Returns the user and the password for `host`: those of its `machine`, or else those of `default`.
pub(super) fn credentials(text: &str, host: &str) -> Option<(String, String)> {
    let mut words = text.split_ascii_whitespace();
    let mut entry: Option<(Option<String>, Option<String>)> = None;
    while let Some(word) = words.next() {
        match word {
            "machine" | "default" => {
                if let Some((Some(user), Some(password))) = entry {
                    return Some((user, password));
                }
                let applies = word == "default" || words.next() == Some(host);
                entry = applies.then_some((None, None));
            }
            "login" => {
                let value = words.next().map(str::to_owned);
                if let Some((user, _)) = &mut entry {
                    *user = value;
                }
            }
            "password" => {
                let value = words.next().map(str::to_owned);
                if let Some((_, password)) = &mut entry {
                    *password = value;
                }
            }
            _ => {}
        }
    }
    match entry {
        Some((Some(user), Some(password))) => Some((user, password)),
        Some(_) | None => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_of_the_host_is_used_or_else_the_default() {
        let text = "machine a.example login u password p\nmachine b.example\n  password q\n  login v\ndefault login d password e\n";
        let found = |host: &str| credentials(text, host).map(|(user, password)| format!("{user}:{password}"));
        assert_eq!(found("a.example").as_deref(), Some("u:p"));
        assert_eq!(found("b.example").as_deref(), Some("v:q"));
        assert_eq!(found("c.example").as_deref(), Some("d:e"));
        assert_eq!(credentials("machine a login u", "a"), None);
        assert_eq!(credentials("machine a login u password p", "b"), None);
        assert_eq!(credentials("machine", "b"), None);
    }
}
