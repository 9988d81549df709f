//! Network of IP addresses, as configurations name the peers that they trust.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// IP network: an address and the length of its prefix. A single address is a network with one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IpNetwork {
    address: IpAddr,
    prefix: u8,
}

impl IpNetwork {
    /// Returns whether the network contains an address; an IPv4 address in the form of IPv6 counts as IPv4.
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.address, address.to_canonical()) {
            (IpAddr::V4(own), IpAddr::V4(other)) => {
                let mask = u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0);
                (own.to_bits() ^ other.to_bits()) & mask == 0
            }
            (IpAddr::V6(own), IpAddr::V6(other)) => {
                let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix)).unwrap_or(0);
                (own.to_bits() ^ other.to_bits()) & mask == 0
            }
            _ => false,
        }
    }
}

impl From<IpAddr> for IpNetwork {
    fn from(address: IpAddr) -> IpNetwork {
        let address = address.to_canonical();
        IpNetwork { address, prefix: bits(address) }
    }
}

impl FromStr for IpNetwork {
    type Err = String;

    fn from_str(text: &str) -> Result<IpNetwork, String> {
        let shown: String = text.chars().take(64).collect();
        let problem =
            |problem: &str| format!("{shown:?} {problem}; write one such as \"10.0.0.0/16\" or \"10.0.0.7\"");
        let (address, prefix) =
            text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let address: IpAddr = address.parse().map_err(|_| problem("is not a network"))?;
        let Some(prefix) = prefix else { return Ok(address.into()) };
        let is_number = !prefix.is_empty() && prefix.bytes().all(|byte| byte.is_ascii_digit());
        let prefix = is_number.then(|| prefix.parse().ok()).flatten();
        let prefix = prefix.filter(|prefix| *prefix <= bits(address));
        let prefix = prefix.ok_or_else(|| problem("has an invalid prefix length"))?;
        let network = IpNetwork { address, prefix };
        // `10.0.0.7/8` is a mistake: the author means one address, or another network.
        let has_host_bits = match address {
            IpAddr::V4(ip) => ip.to_bits().checked_shl(prefix.into()).unwrap_or(0) != 0,
            IpAddr::V6(ip) => ip.to_bits().checked_shl(prefix.into()).unwrap_or(0) != 0,
        };
        if has_host_bits { Err(problem("has bits after its prefix")) } else { Ok(network) }
    }
}

/// Returns the address, or the network of 64 bits of an IPv6 address, of which a client has all: what a limit per client
/// counts.
pub fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 64 << 64).into()),
    }
}

fn bits(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

impl fmt::Display for IpNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix {
            prefix if prefix == bits(self.address) => self.address.fmt(f),
            prefix => write!(f, "{}/{prefix}", self.address),
        }
    }
}

configuration::text_values! { IpNetwork = "IP network, or IP address" }

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_contains_the_addresses_with_its_prefix() {
        for (network, address, expected) in [
            ("10.1.0.0/16", "10.1.255.255", true),
            ("10.1.0.0/16", "10.2.0.0", false),
            ("10.1.0.0/16", "::ffff:10.1.2.3", true),
            ("10.1.2.3", "10.1.2.3", true),
            ("10.1.2.3", "10.1.2.4", false),
            ("0.0.0.0/0", "255.1.2.3", true),
            ("0.0.0.0/0", "::1", false),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("::/0", "2001:db9::1", true),
            ("::1", "::1", true),
        ] {
            let parsed: IpNetwork = network.parse().unwrap();
            assert_eq!(parsed.contains(address.parse().unwrap()), expected, "{network} {address}");
            assert_eq!(parsed.to_string(), network);
        }
    }

    #[test]
    fn a_text_that_is_not_a_network_is_rejected_with_its_problem() {
        for (text, problem) in [
            ("", "not a network"),
            ("10.0.0", "not a network"),
            ("load-balancer", "not a network"),
            ("10.0.0.0/33", "prefix length"),
            ("10.0.0.0/+8", "prefix length"),
            ("10.0.0.0/", "prefix length"),
            ("::/129", "prefix length"),
            ("10.0.0.7/8", "bits after"),
            ("2001:db8::1/32", "bits after"),
        ] {
            let error = text.parse::<IpNetwork>().unwrap_err();
            assert!(error.contains(problem) && error.contains("10.0.0.0/16"), "{text}: {error}");
        }
    }
}
