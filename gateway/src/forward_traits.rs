//! Traits that Pingora requires of a connection, for wrappers of one.

/// Implements the traits of a connection except reads, writes and the shutdown by those of the wrapped one.
macro_rules! forward_connection_traits {
    ($wrapper:ident<$parameter:ident: $bound:ident>, $inner:ident) => {
        const _: () = {
            use pingora::protocols::raw_connect::ProxyDigest;
            use pingora::protocols::tls::{SslDigest, TlsRef};
            use pingora::protocols::{
                ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, SocketDigest, Ssl,
                TimingDigest, UniqueID, UniqueIDType,
            };
            use std::sync::Arc;
            use std::time::Duration;

            impl<$parameter: $bound> UniqueID for $wrapper<$parameter> {
                fn id(&self) -> UniqueIDType {
                    self.$inner.id()
                }
            }

            impl<$parameter: $bound> Ssl for $wrapper<$parameter> {
                fn get_ssl(&self) -> Option<&TlsRef> {
                    self.$inner.get_ssl()
                }

                fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
                    self.$inner.get_ssl_digest()
                }

                fn selected_alpn_proto(&self) -> Option<ALPN> {
                    self.$inner.selected_alpn_proto()
                }
            }

            impl<$parameter: $bound> GetTimingDigest for $wrapper<$parameter> {
                fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
                    self.$inner.get_timing_digest()
                }

                fn get_read_pending_time(&self) -> Duration {
                    self.$inner.get_read_pending_time()
                }

                fn get_write_pending_time(&self) -> Duration {
                    self.$inner.get_write_pending_time()
                }
            }

            impl<$parameter: $bound> GetProxyDigest for $wrapper<$parameter> {
                fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
                    self.$inner.get_proxy_digest()
                }

                fn set_proxy_digest(&mut self, digest: ProxyDigest) {
                    self.$inner.set_proxy_digest(digest);
                }
            }

            impl<$parameter: $bound> GetSocketDigest for $wrapper<$parameter> {
                fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
                    self.$inner.get_socket_digest()
                }

                fn set_socket_digest(&mut self, digest: SocketDigest) {
                    self.$inner.set_socket_digest(digest);
                }
            }

            #[async_trait::async_trait]
            impl<$parameter: $bound> Peek for $wrapper<$parameter> {
                async fn try_peek(&mut self, into: &mut [u8]) -> std::io::Result<bool> {
                    self.$inner.try_peek(into).await
                }
            }
        };
    };
}

pub(crate) use forward_connection_traits;
