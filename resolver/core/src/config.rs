//! The table `[dns]`.

use std::net::SocketAddr;

use configuration::section;

/// Maximum number of DNS servers; more would only delay a failed query.
const SERVERS_MAX: usize = 4;

section! {
    /// Resolution of names; without this table by the servers in /etc/resolv.conf. /etc/hosts is read in both cases.
    #[derive(Clone, Debug, Default)]
    pub struct DnsSection {
        /// DNS servers, instead of those in /etc/resolv.conf; names are then resolved as written, without search domains.
        pub servers: Vec<SocketAddr> = Vec::new(), in 0..=SERVERS_MAX, like "\"10.0.0.2:53\"";
    }
}
