//! DNS client: queries for the IPv4 and IPv6 addresses of a name.

use std::net::SocketAddr;
use std::time::Duration;

use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ResolverConfig, ResolverOpts};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError, NoRecords};
use hickory_resolver::proto::op::ResponseCode;
use hickory_resolver::proto::rr::RecordType;
use hickory_resolver::{TokioResolver, system_conf};
use regions::HostName;
use resolver_core::config::DnsSection;
use resolver_core::names::{Answer, QueryFailure};
use tokio::time::timeout;

/// Timeout of one attempt at one server; there are two attempts.
const SERVER_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout of a query over all servers and search domains.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// Client of the DNS servers.
#[derive(Clone)]
pub(crate) struct DnsClient {
    /// `None` if the servers are not known.
    resolver: Option<TokioResolver>,
    /// Whether names are resolved as written, without search domains.
    absolute: bool,
}

impl DnsClient {
    pub(crate) fn new(section: &DnsSection) -> DnsClient {
        let absolute = !section.servers.is_empty();
        let known = match section.servers.as_slice() {
            [] => system_conf::read_system_conf(),
            servers => {
                let servers = servers.iter().map(|server| name_server(*server)).collect();
                Ok((ResolverConfig::from_parts(None, Vec::new(), servers), ResolverOpts::default()))
            }
        };
        let resolver = known.and_then(|(config, options)| {
            let mut builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
            // Answers are cached once, by `resolver_core`, which also uses the TTL of aliases.
            let into = builder.options_mut();
            *into = options;
            into.cache_size = 0;
            into.preserve_intermediates = true;
            into.timeout = into.timeout.min(SERVER_TIMEOUT);
            builder.build()
        });
        let resolver = resolver.inspect_err(|error| {
            // Endpoints with IP addresses work. For names, write [dns] servers or correct the file, and restart.
            tracing::warn!(%error, "failed to read /etc/resolv.conf; no name can be resolved");
        });
        DnsClient { resolver: resolver.ok(), absolute }
    }

    /// Resolves a name. A family without addresses, or whose query failed, is left out if the other one has some.
    pub(crate) async fn query(&self, name: &HostName) -> Result<Answer, QueryFailure> {
        let mut text = name.as_str().to_owned();
        if self.absolute && !text.ends_with('.') {
            text.push('.');
        }
        let Some(resolver) = &self.resolver else { return Err(QueryFailure::Unavailable) };
        let query = async |family| answer(name, resolver.lookup(text.as_str(), family).await);
        let both = async { tokio::join!(query(RecordType::AAAA), query(RecordType::A)) };
        match timeout(QUERY_TIMEOUT, both).await.map_err(|_| QueryFailure::Unavailable)? {
            (Ok(six), Ok(four)) => {
                let ttl = six.ttl.min(four.ttl);
                Ok(Answer { addresses: [six.addresses, four.addresses].concat(), ttl })
            }
            (Ok(found), Err(_)) | (Err(_), Ok(found)) => Ok(found),
            (Err(QueryFailure::NoAddresses(one)), Err(QueryFailure::NoAddresses(other))) => {
                Err(QueryFailure::NoAddresses(one.into_iter().chain(other).min()))
            }
            (Err(_), Err(_)) => Err(QueryFailure::Unavailable),
        }
    }
}

fn name_server(server: SocketAddr) -> NameServerConfig {
    let connections = [ConnectionConfig::udp(), ConnectionConfig::tcp()];
    let connections = connections.map(|mut connection| {
        connection.port = server.port();
        connection
    });
    NameServerConfig::new(server.ip(), true, connections.into())
}

fn answer(
    name: &HostName,
    found: Result<hickory_resolver::lookup::Lookup, NetError>,
) -> Result<Answer, QueryFailure> {
    match found {
        Ok(lookup) => {
            let records = lookup.answers();
            let ttl = records.iter().map(|record| record.ttl).min().unwrap_or_default();
            let ttl = Duration::from_secs(ttl.into());
            let addresses: Vec<_> = records.iter().filter_map(|record| record.data.ip_addr()).collect();
            if addresses.is_empty() {
                Err(QueryFailure::NoAddresses(Some(ttl)))
            } else {
                Ok(Answer { addresses, ttl })
            }
        }
        Err(NetError::Dns(DnsError::NoRecordsFound(NoRecords {
            response_code: ResponseCode::NXDomain | ResponseCode::NoError,
            negative_ttl,
            ..
        }))) => Err(QueryFailure::NoAddresses(negative_ttl.map(|ttl| Duration::from_secs(ttl.into())))),
        Err(error) => {
            // A DNS server did not respond or returned an error. The last addresses of the name stay in use.
            tracing::debug!(%name, %error, "DNS query failed");
            Err(QueryFailure::Unavailable)
        }
    }
}
