//! Address of an endpoint of another process: a host, which is a DNS name or an IP address, and a port.
//!
//! A configuration, a registration and the route table carry the name, not what it resolves to: behind one name the
//! addresses change without a new registration, and a load balancer has several. Processes resolve a name when they
//! connect. A name is no identity: peers are authenticated by their certificates.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

/// Maximum length of a DNS name in characters (RFC 1035, section 2.3.4, without the final dot).
const NAME_MAX: usize = 253;
/// Maximum length of one label of a DNS name in characters.
const LABEL_MAX: usize = 63;
/// Maximum length of an address in an error message, in characters.
const SHOWN_MAX: usize = 64;

/// Host and port of an endpoint to connect to. Its clone does not allocate.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostPort {
    host: Host,
    port: u16,
}

/// DNS name or IP address.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Host {
    /// IP address.
    Ip(IpAddr),
    /// DNS name.
    Name(HostName),
}

/// Valid DNS name, in lower case. A final dot is kept: such a name is absolute, and no search domain is added to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostName(Arc<str>);

/// Error for a text that is not an address to which a process can connect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} {problem}; write HOST:PORT, such as \"10.0.0.7:7100\", \"[2001:db8::7]:7100\" or \"spoke.example.com:7100\""
)]
pub struct HostPortError {
    text: String,
    problem: &'static str,
}

impl HostPort {
    /// Returns the host.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Returns the port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns the address if the host is an IP address.
    pub fn socket_address(&self) -> Option<SocketAddr> {
        match self.host {
            Host::Ip(ip) => Some(SocketAddr::new(ip, self.port)),
            Host::Name(_) => None,
        }
    }

    /// Returns whether the address is on this host whatever the DNS server responds.
    pub fn is_loopback(&self) -> bool {
        match &self.host {
            Host::Ip(ip) => ip.is_loopback(),
            Host::Name(name) => name.is_localhost(),
        }
    }
}

impl HostName {
    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns whether the name is `localhost` or below it: such names are loopback addresses (RFC 6761, section 6.3).
    pub fn is_localhost(&self) -> bool {
        let name = self.0.strip_suffix('.').unwrap_or(&self.0);
        name == "localhost" || name.ends_with(".localhost")
    }
}

impl From<SocketAddr> for HostPort {
    fn from(address: SocketAddr) -> HostPort {
        HostPort { host: Host::Ip(address.ip()), port: address.port() }
    }
}

impl<T: Into<IpAddr>> From<(T, u16)> for HostPort {
    fn from(address: (T, u16)) -> HostPort {
        SocketAddr::from(address).into()
    }
}

impl FromStr for HostPort {
    type Err = HostPortError;

    fn from_str(text: &str) -> Result<HostPort, HostPortError> {
        read(text).map_err(|problem| HostPortError { text: text.chars().take(SHOWN_MAX).collect(), problem })
    }
}

impl FromStr for HostName {
    type Err = String;

    fn from_str(text: &str) -> Result<HostName, String> {
        read_name(text).map_err(|problem| {
            let shown: String = text.chars().take(SHOWN_MAX).collect();
            format!("{shown:?} {problem}; write a DNS name, such as \"spoke.example.com\"")
        })
    }
}

fn read(text: &str) -> Result<HostPort, &'static str> {
    let (host, port) = match text.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or("has no closing bracket")?;
            let host = read_ipv6(host)?;
            (host, rest.strip_prefix(':').ok_or("has no port")?)
        }
        None => {
            let (host, port) = text.rsplit_once(':').ok_or("has no port")?;
            if host.contains(':') {
                return Err("has colons outside of brackets");
            }
            (read_host(host)?, port)
        }
    };
    let is_number = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port: Option<u16> = is_number.then(|| port.parse().ok()).flatten();
    match port {
        None => Err("has a port that is not a number from 1 to 65535"),
        Some(0) => Err("has the port 0, to which nothing can connect"),
        Some(port) => Ok(HostPort { host, port }),
    }
}

fn read_host(text: &str) -> Result<Host, &'static str> {
    if let Ok(ip) = text.parse::<Ipv4Addr>() {
        return reachable(ip.into());
    }
    read_name(text).map(Host::Name)
}

fn read_ipv6(text: &str) -> Result<Host, &'static str> {
    if text.contains('%') {
        return Err("has a zone, which is valid on one machine only");
    }
    let ip: Ipv6Addr = text.parse().map_err(|_| "has brackets around what is not an IPv6 address")?;
    if ip.to_ipv4_mapped().is_some() {
        return Err("is an IPv4 address in the form of IPv6");
    }
    reachable(ip.into())
}

/// Checks that other processes can connect to this address.
fn reachable(ip: IpAddr) -> Result<Host, &'static str> {
    let is_broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    if ip.is_unspecified() || ip.is_multicast() || is_broadcast {
        return Err("is unreachable for other processes");
    }
    Ok(Host::Ip(ip))
}

fn read_name(text: &str) -> Result<HostName, &'static str> {
    let name = text.strip_suffix('.').unwrap_or(text);
    if name.is_empty() {
        return Err("has no host");
    }
    if name.len() > NAME_MAX {
        return Err("has a name of more than 253 characters");
    }
    for label in name.split('.') {
        // An underscore is not allowed in a host name, but names of containers have them.
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if !label.bytes().all(is_valid) {
            return Err("has a name with other characters than letters, digits, `-`, `_` and `.`");
        }
        if label.is_empty() || label.len() > LABEL_MAX || label.starts_with('-') || label.ends_with('-') {
            return Err(
                "has a name with an empty part, one of more than 63 characters, or a `-` at an end of one",
            );
        }
    }
    // Such a text is a mistyped IPv4 address, which some resolvers accept and read differently: `010.0.0.1`, `10.1`.
    let last = name.rsplit('.').next().unwrap_or(name);
    let is_hexadecimal =
        last.strip_prefix("0x").is_some_and(|rest| rest.bytes().all(|b| b.is_ascii_hexdigit()));
    if last.bytes().all(|byte| byte.is_ascii_digit()) || is_hexadecimal {
        return Err("is neither an IPv4 address nor a name: the last part of a name is not a number");
    }
    Ok(HostName(text.to_ascii_lowercase().into()))
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Ip(ip) => SocketAddr::new(*ip, self.port).fmt(f),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Host::Ip(ip) => ip.fmt(f),
            Host::Name(name) => name.fmt(f),
        }
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

configuration::text_values! { HostPort = "address with a name or an IP address" }

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_and_addresses_of_both_families_are_read_and_written_the_same() {
        for text in [
            "10.0.0.7:7100",
            "127.0.0.1:1",
            "[2001:db8::7]:7100",
            "[::1]:65535",
            "spoke.example.com:7100",
            "spoke.example.com.:7100",
            "localhost:1",
            "spoke_1:7100",
            "xn--bcher-kva.example:443",
            "1.example:1",
        ] {
            let address: HostPort = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(address.socket_address(), text.parse().ok(), "{text}");
        }
        let upper: HostPort = "Spoke.EXAMPLE.com:7100".parse().unwrap();
        assert_eq!(upper, "spoke.example.com:7100".parse().unwrap(), "names have no case");
        let long: HostPort = "[2001:DB8:0:0::7]:07100".parse().unwrap();
        assert_eq!(long.to_string(), "[2001:db8::7]:7100");
    }

    #[test]
    fn a_text_that_is_not_an_address_is_rejected_with_its_problem() {
        let (label, name) = ("a".repeat(LABEL_MAX + 1), format!("{}.com", "a.".repeat(126)));
        for (text, problem) in [
            ("", "no port"),
            ("spoke", "no port"),
            (":7100", "no host"),
            (".:7100", "no host"),
            ("10.0.0.7:", "not a number"),
            ("10.0.0.7:+1", "not a number"),
            ("10.0.0.7:65536", "not a number"),
            ("10.0.0.7:0", "port 0"),
            ("0.0.0.0:7100", "unreachable"),
            ("[::]:7100", "unreachable"),
            ("224.0.0.1:1", "unreachable"),
            ("255.255.255.255:1", "unreachable"),
            ("[ff02::1]:1", "unreachable"),
            ("[fe80::1%eth0]:1", "zone"),
            ("[::ffff:10.0.0.1]:1", "in the form of IPv6"),
            ("[10.0.0.1]:1", "not an IPv6 address"),
            ("[::1:7100", "closing bracket"),
            ("[::1]", "no port"),
            ("[::1]7100", "no port"),
            ("::1:7100", "outside of brackets"),
            ("10.0.0:1", "neither"),
            ("010.0.0.1:1", "neither"),
            ("10.0.0.256:1", "neither"),
            ("1:1", "neither"),
            ("0x7f000001:1", "neither"),
            ("a..b:1", "empty part"),
            ("-a.b:1", "empty part"),
            ("a-.b:1", "empty part"),
            ("a b:1", "other characters"),
            ("user@host:1", "other characters"),
            ("http://host:1", "outside of brackets"),
            ("bücher.example:1", "other characters"),
            (&format!("{label}:1"), "63"),
            (&format!("{name}:1"), "253"),
        ] {
            let error = text.parse::<HostPort>().expect_err(text).to_string();
            assert!(error.contains(problem) && error.contains("HOST:PORT"), "{text}: {error}");
        }
    }

    #[test]
    fn localhost_and_loopback_addresses_are_loopback_and_no_other_name() {
        for (text, expected) in [
            ("127.9.0.1:1", true),
            ("[::1]:1", true),
            ("localhost:1", true),
            ("LOCALHOST.:1", true),
            ("a.localhost:1", true),
            ("10.0.0.1:1", false),
            ("localhost.example:1", false),
            ("notlocalhost:1", false),
        ] {
            assert_eq!(text.parse::<HostPort>().unwrap().is_loopback(), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic_and_what_it_accepts_round_trips(text in "\\PC{0,40}") {
            if let Ok(address) = text.parse::<HostPort>() {
                prop_assert_eq!(address.to_string().parse(), Ok(address));
            }
        }

        #[test]
        fn every_socket_address_that_is_accepted_is_the_same_address(v6: [u8; 16], v4: [u8; 4], port in 1..=u16::MAX) {
            for ip in [IpAddr::from(v6), IpAddr::from(v4)] {
                let address = SocketAddr::new(ip, port);
                if let Ok(read) = address.to_string().parse::<HostPort>() {
                    prop_assert_eq!(read.socket_address(), Some(address));
                    prop_assert_eq!(read, HostPort::from(address));
                }
            }
        }
    }
}
