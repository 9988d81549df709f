//! The resolver as that of an HTTP client, which tries the addresses in their order (RFC 8305) itself.

use std::net::SocketAddr;

use regions::{Host, HostName};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use crate::Resolver;

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let resolver = self.clone();
        Box::pin(async move {
            let name: HostName = name.as_str().parse()?;
            let addresses = resolver.addresses(&Host::Name(name)).await?;
            // The client replaces the port by that of the URL.
            let addresses: Addrs = Box::new(addresses.into_iter().map(|ip| SocketAddr::new(ip, 0)));
            Ok(addresses)
        })
    }
}
