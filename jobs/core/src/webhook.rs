//! Targets of webhooks: a client selects the URL, so a target in the operator's own network must not be reachable by it
//! (server-side request forgery).
//!
//! Only addresses of the public internet are permitted, and the networks that the operator has listed. Plaintext HTTP is
//! permitted to listed networks only: elsewhere anyone on the path could read the result. The address of the
//! connection itself is checked, at every attempt, so a name that resolves to another address later changes nothing.

use regions::IpNetwork;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Longest URL of a webhook, bytes.
pub const URL_BYTES_MAX: usize = 2048;
/// Largest result that a message contains, bytes; the message has the path of a larger one. With the rest of the message it
/// stays below 1 MiB, the default limit of nginx on a body (`client_max_body_size`). It also bounds the memory of the
/// messages that are being sent.
pub const MESSAGE_RESULT_BYTES_MAX: u64 = 1_000_000;

/// Rules for the targets of webhooks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WebhookPolicy {
    /// Networks that are permitted beside the public internet, and over plaintext HTTP.
    pub private_targets: Vec<IpNetwork>,
}

impl WebhookPolicy {
    /// Whether a result may be sent to an address, over TLS or not.
    pub fn permits(&self, address: IpAddr, is_plaintext: bool) -> bool {
        let is_listed = self.private_targets.iter().any(|network| network.contains(address));
        is_listed || !is_plaintext && is_public(address)
    }

    /// Whether there is an address to which a result may be sent without TLS.
    pub fn permits_plaintext(&self) -> bool {
        !self.private_targets.is_empty()
    }
}

/// Whether an address belongs to the public internet, by IANA's registries of special-purpose addresses.
pub fn is_public(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let is_special = match (a, b, c) {
        // This network, loopback, private use (three blocks).
        (0 | 10 | 127, _, _) | (172, 16..=31, _) | (192, 168, _) => true,
        // Carrier-grade NAT (RFC 6598), link-local addresses (instance metadata).
        (100, 64..=127, _) | (169, 254, _) => true,
        // Protocol assignments, documentation (three blocks), relays of 6to4, benchmarks.
        (192, 0, 0 | 2) | (198, 51, 100) | (203, 0, 113) | (192, 88, 99) | (198, 18..=19, _) => true,
        // Multicast, reserved addresses, broadcast.
        (224.., _, _) => true,
        _ => false,
    };
    !is_special
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    match address.segments() {
        // Protocol assignments with Teredo, documentation (two blocks), 6to4 (which contains an IPv4 address).
        [0x2001, 0..=0x1ff | 0xdb8, ..] | [0x2002, ..] | [0x3fff, 0..=0xfff, ..] => false,
        // Global unicast addresses. All others are special, also those of NAT64, which contain an IPv4 address.
        [first, ..] => (0x2000..0x4000).contains(&first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_addresses_are_not_public() {
        let special = "0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.127.255.255 127.0.0.1 127.255.0.1 169.254.169.254 172.16.0.1 \
                       172.31.255.255 192.0.0.1 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1 198.19.255.255 198.51.100.7 \
                       203.0.113.9 224.0.0.1 240.0.0.1 255.255.255.255 :: ::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 \
                       ::127.0.0.1 64:ff9b::7f00:1 64:ff9b:1::1 100::1 2001::1 2001:10::1 2001:20::1 2001:db8::1 \
                       2002:7f00:1::1 3fff::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fec0::1 ff02::1";
        for address in special.split_whitespace() {
            assert!(!is_public(address.parse().unwrap()), "{address}");
        }
        let public = "1.1.1.1 8.8.8.8 99.255.255.255 100.63.255.255 100.128.0.1 126.0.0.1 128.0.0.1 169.253.0.1 172.15.0.1 \
                      172.32.0.1 192.0.1.1 192.1.0.1 192.167.0.1 192.169.0.1 198.17.0.1 198.20.0.1 223.255.255.255 \
                      ::ffff:8.8.8.8 2001:200::1 2001:4860:4860::8888 2003::1 2606:4700::1111 3ffe::1 3fff:1000::1";
        for address in public.split_whitespace() {
            assert!(is_public(address.parse().unwrap()), "{address}");
        }
    }

    #[test]
    fn a_listed_network_is_permitted_and_no_other_is_without_tls() {
        let policy = WebhookPolicy { private_targets: vec!["10.1.0.0/16".parse().unwrap()] };
        assert!(policy.permits_plaintext() && !WebhookPolicy::default().permits_plaintext());
        for (address, over_tls, plaintext) in [
            ("10.1.2.3", true, true),
            ("::ffff:10.1.2.3", true, true),
            ("10.2.0.1", false, false),
            ("8.8.8.8", true, false),
        ] {
            let address = address.parse().unwrap();
            assert_eq!(policy.permits(address, false), over_tls, "{address}");
            assert_eq!(policy.permits(address, true), plaintext, "{address}");
        }
        assert!(!WebhookPolicy::default().permits([10, 1, 2, 3].into(), false));
    }
}
