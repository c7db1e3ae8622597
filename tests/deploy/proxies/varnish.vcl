# The built-in rules, and a backend.
vcl 4.1;

backend chargpt {
    .host = "127.0.0.1";
    .port = "@SERVICE@";
    .first_byte_timeout = 310s;
    .between_bytes_timeout = 310s;
}

sub vcl_backend_fetch {
    set bereq.http.X-Request-Id = "varnish-" + bereq.xid;
}
